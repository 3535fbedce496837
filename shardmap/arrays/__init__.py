"""Arrays on devices and in processes: reading, placing, stacking.

It does not know maps.
"""
