"""What an engine keeps of sequences: which state is whose, and where a prefix can be resumed. Pure bookkeeping."""
