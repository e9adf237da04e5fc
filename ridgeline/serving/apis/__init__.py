"""The APIs that clients speak, one folder each, and the application that serves those over HTTP."""
