"""The transform table: every operation under every transform, beside plain torch (see `table`)."""
