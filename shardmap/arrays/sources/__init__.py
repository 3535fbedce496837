"""Values that other processes open for themselves: files and stores."""
