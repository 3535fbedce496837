"""Arrays on devices and in processes: reading, placing, stacking. It knows no map."""
