"""Work that runs elsewhere: in a process of its own."""
