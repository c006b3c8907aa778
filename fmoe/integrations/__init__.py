"""Other libraries' models and layers on fmoe."""
