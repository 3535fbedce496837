"""Statistics in one pass: what two stages would read is read in one."""
