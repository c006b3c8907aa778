"""Where tokens and experts live, and how a program is rewritten for it."""
