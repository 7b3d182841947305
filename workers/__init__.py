"""Work that several processes share, through files alone."""
