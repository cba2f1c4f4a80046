"""One node's side: frames are taken, kept, and sent until the head has them on disk."""
