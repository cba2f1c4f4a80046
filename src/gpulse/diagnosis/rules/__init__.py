"""The rules, a file a family. A new one is one function with its metadata in its family's tuple."""
