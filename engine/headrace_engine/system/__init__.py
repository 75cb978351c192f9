"""What the operating system allows and provides: control groups, private folders, other interpreters, the heap."""
