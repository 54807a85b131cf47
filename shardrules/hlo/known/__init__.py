"""Facts about one value: the devices on which it is equal, its integers, its ranges."""
