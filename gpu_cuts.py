SPLIT = True
CUTS = {
 "FEW s2r8 e8 p1": tc.FEW, "MANY s4r16 e16.2.2 p2": tc.MANY,
 "s4r8 e8 p2": C(S(4,8,3,2), E(8,4,2,2), 2),
 "s8r8 e8.2.4 p1": C(S(8,8,2,2), E(8,2,4,2), 1),
 "s8r16b1 e16.4.2b1 p4": C(S(8,16,2,1), E(16,4,2,1), 4),
 "s4r8.2 e8 p4": C(S(4,8,2,2), E(8,4,2,2), 4),
 "s2r16 e16.2.2 p1": C(S(2,16,2,2), E(16,2,2,2), 1),
}
ODD = list(CUTS)[:2]
TRITON = False
CASES = [("7b-qkv", (1, 8, 32, 128)), ("qwen-gate-up", (32, 128)), ("7b-down", (1, 32))]
