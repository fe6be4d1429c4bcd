"""One file per algorithm: two functions and its options. The files line up, so diff them."""
