"""Search by vectors and by words, and what a search is worth."""
