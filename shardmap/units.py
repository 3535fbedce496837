"""Bytes and seconds, as people read them."""


def size(count: int) -> str:
    """A number of bytes for people.

    >>> size(1536), size(12)
    ('1.5 KiB', '12 B')
    """
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.1f} {unit}" if unit != "B" else f"{count} B"
        amount /= 1024
    return f"{amount:.1f} TiB"


def duration(seconds: float) -> str:
    """A time for people.

    >>> duration(0.0000123), duration(2.5)
    ('12.3 us', '2.5 s')
    """
    for unit, length in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
