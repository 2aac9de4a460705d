"""The resolved launch: what is captured, by whom, and how it is started. Pure; no torch."""
