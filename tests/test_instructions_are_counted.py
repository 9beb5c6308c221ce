"""Instructions of loops, read from machine code as nvdisasm prints it."""

from tritoncaps.kernels.common.triton.instructions import nest

CODE = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   LDG.E R2, [R4.64] ;
.L_x_1:
        /*0020*/                   FFMA R3, R2, R2, R3 ;
        /*0030*/                   FADD R3, R3, R2 ;
        /*0040*/              @!P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0050*/                   FMUL R3, R3, R2 ;
        /*0060*/               @P1 BRA `(.L_x_2) ;
        /*0070*/               @P2 BRA `(.L_x_0) ;
        /*0080*/                   EXIT ;
.L_x_3:
        /*0090*/                   BRA `(.L_x_3);
"""


def test_loops_inside_of_loops():
    """The outer loop has a load and a jump of its own; of the two inside, the larger one counts."""
    assert nest(CODE) == [2, 3]


def test_code_without_loops():
    assert nest("        /*0000*/                   EXIT ;\n") == []
