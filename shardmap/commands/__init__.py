"""The commands of `python -m shardmap`, one module each.

The exit code is 0 for success, 1 if a check failed, and 2 if the command could not run;
then one line on stderr says why.
"""
