def check_support(config): pass
