"""Where a store can live: the contract (`contract`), the backends that keep it, and which URL scheme means which."""
