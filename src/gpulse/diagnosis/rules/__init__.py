"""The rules, one file per family. A new rule is one function, and its metadata in the family's tuple."""
