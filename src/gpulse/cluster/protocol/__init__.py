"""What a head can be asked: one table of operations behind gRPC and HTTP."""
