# An implementation without a model, for the tests of the interface; it needs nothing.
