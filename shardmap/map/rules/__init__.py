"""The rules of maps for JAX's transformations; `shardmap.map.lowering` registers them.

Each rule transforms the function of one element by JAX's own transformation, traces
the result with the axis bound, and binds the map again. So any composition of
transformations of a map is a program of maps.
"""
