"""How options are declared, checked, and read from TOML."""
