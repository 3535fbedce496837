"""What runs in parallel, where arrays are, what moves: reads the other rooms only.

`api` has `explain`, which asks a function (`functions`) for its program, lets `read`
see what is in it, and fills in a `report`. An `explanation` is one that prints, shows
and saves itself, as `draw` does it. `interconnect` estimates times.
"""
