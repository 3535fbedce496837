"""The axis map as JAX sees it: its primitive, its rules, its lowering."""
