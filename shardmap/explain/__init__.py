"""Show how arrays lie on devices. Reads the other rooms, never changes anything."""
