"""What the project's pages and stored results say about its code, checked against the code itself."""
