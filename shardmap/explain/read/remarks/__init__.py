"""What is worth a look in a program: found, with numbers, and what to do instead."""
