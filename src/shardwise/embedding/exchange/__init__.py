"""One step of a sharded collection: ids go to the owners of rows, rows and gradients come back."""
