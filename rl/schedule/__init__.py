"""Pure scheduling decisions: overlap, staleness gate, group buffer."""
