"""The page that the gateway serves, and the endpoints of its views. The browser's files are in `static`."""
