"""The devices beside the CPU, and how one is opened by its name."""
