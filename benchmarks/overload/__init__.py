"""More requests than two worker groups can answer, for minutes: what becomes of each class of them."""
