"""What runs in parallel, where arrays lie, what moves: reads the other rooms only.

`api` has `explain`, which fills in what `report` describes. `axes`, `arrays`,
`collectives`, `hlo` and `remarks` read a program, each one thing of it; `page` and
`html` draw the result, with the pictures of `text` and `svg`.
"""
