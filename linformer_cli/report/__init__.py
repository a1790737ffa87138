"""Everything a person or a program sees: tables, pictures, terminal previews. It renders and never prints."""
