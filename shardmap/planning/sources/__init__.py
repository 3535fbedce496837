"""Values that other processes can open themselves: files and stores."""
