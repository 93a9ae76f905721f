"""Moving ids and rows between ranks: what several front doors share."""
