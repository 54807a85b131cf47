"""What is known of one value: on which devices it is equal, which integers it holds, its ranges."""
