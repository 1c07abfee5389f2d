"""Draft here, verify there: what a device and a server say to each other, and the device's side."""
