"""The commands of `python -m shardmap`, one module each.

A command ends with 0 when it did what was asked, with 1 when a check of its own failed,
and with 2 when it could not do what was asked; then one line on stderr says why.
"""
