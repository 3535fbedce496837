"""The axis map: one primitive, its rules, its lowering, and what users call."""
