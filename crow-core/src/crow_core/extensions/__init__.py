"""Extensions that ship with the core; each joins in by the same moments as anyone's."""
