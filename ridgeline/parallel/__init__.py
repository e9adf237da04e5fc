"""Several devices that act as one: which rank is where, and what ranks say to each other."""
