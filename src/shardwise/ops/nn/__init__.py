"""What layers call: attention, norms, convolutions, recurrent nets, pooling, losses."""
