"""What `roundhouse doctor` looks at, one module a subject."""
