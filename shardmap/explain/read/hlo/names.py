"""What XLA calls where an instruction comes from."""


def merged_names(op_name: str) -> list[str]:
    """What each of the operations is called that XLA made one of; [] for one alone.

    >>> merged_names("jit(f)/(jvp(g)/dot_general:a/reduce_sum)")
    ['jit(f)/jvp(g)/dot_general', 'jit(f)/a/reduce_sum']
    >>> merged_names("jit(f)/transpose(jvp(g))")
    []
    """
    depth, start, ends = 0, len(op_name), [len(op_name) - 1]
    while start > 0 and op_name.endswith(")"):
        start -= 1
        depth += {")": 1, "(": -1}.get(op_name[start], 0)
        if depth == 0:
            break
        if depth == 1 and op_name[start] == ":":
            ends.append(start)
    if len(ends) == 1 or op_name[start - 1 : start] not in ("", "/"):
        return []
    starts = [start, *reversed(ends[1:])]
    return [
        op_name[:start] + op_name[first + 1 : last]
        for first, last in zip(starts, reversed(ends), strict=True)
    ]
