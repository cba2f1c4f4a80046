"""Protocol between clients and a head: operations, requests and answers, the same over gRPC and HTTP."""
