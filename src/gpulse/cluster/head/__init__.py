"""The head's side: what agents send is kept, and questions are answered."""
