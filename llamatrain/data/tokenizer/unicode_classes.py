"""The kind of each code point, in the Unicode version of llama.cpp.

Python's `unicodedata` differs between versions, and words of new letters would be split differently from
llama.cpp. scripts/unicode_classes.py writes RUNS: kinds and lengths of runs, compressed.
"""

import base64
import re
import zlib
from functools import cache

import numpy as np

VERSION = "15.1.0"
CODE_POINTS = 0x110000
KINDS = "XNLPMSZ"  # anything else, number, letter, punctuation, mark, symbol, white space

RUNS = (
    "c-oDaS(3Ck5`?dWR^Sd2hM8Vu^~QStBh2RkS$|dcO!qt}lLR5f;^E=SK7Xa|{Fhrpb8BYAWm|m<t1oV|o31%sy63XzFW24nr5}mGG`sCuT)bxTvRm}+may_Y"
    ">gKJFV{5S-?JB8_#a3<3)p6jrE57>@HNVGa%@VqPF(MxcOUkr2=9evV!{@GPx%heI-Nx+d&(&34t^OUZPsQy$va;{a$*U#<ece}<UPJMFbqSAS@zs@V7S|DP"
    "TxIFX^va`UE5WR~v?&waRaw`UG}j#?FD7_b=c45UH&{&bGcW75tK6)q`}LMXa}8X|x4oz0CS1#Xu2b<_b(0*y`)uzx?T5>_gB7xFs0z%)<_eipEJlk|C{g>G"
    "{aDVBB@;ow17-x>lcCKo`H69rrCKiAoFB{i@4=E?w#R459{4?$Xj_g8hOsb9_01NV`<u9*3#HdCxfX1&Q@@LUEHeCnh?<}0e|PTZBHzySk@3qlL2AiZ@&G3j"
    "5-k_`_Ai*cUF&`*2R<eIkx9`^%2l~M+tgD{nDP2z@g2VRckdfxwY}|4|8b^|0N*fQ1*TtXY`@(2xlDe7{Vt&^*AKw+38$Z{|M`+i2j7YOGQQrsU@&?j=;WiI"
    "WGl$L(GnLe#!BeaGdp>eNk2*$sx}=dJ|bQxeArZ0={s;q-_!eJv)QvPoSu8KO$!QyLs6;SMi>~^^5R&xy3bg_l10WxEOJrRT2kGGe1O%!Y{Smx*VN)`26c+p"
    "Se1*aDq3{}*^K|Oob^z(fJf1X&t_D560@sp;%P|mZ?Qbre*Rpz|MFC|8a^{(5a!kyR}|WzZ6qy;gtBUxEf4uyocl7mR086@h9%%B;PzyifPpq1&HC+$`}yS8"
    "t^-jS#2#YZVzo&?m8HDymUac0O=s3iM9dqK@G^pVIF=cL^r0m7AijX7EJJ(o+{G-G+dEVSm`39xsyEe5Yo7w<_lBdmRd?<lsQ%*b>V)P%2FAA4xrug-*RFaR"
    "L;9m$eG-!@rx*aQs?zj`EEbvVMVeuqprs)C!FJKE!6}$8$512qac^WFp4a$b?|a-@O6ap{Yfr6@&1g`Cz}4AQozH!&{eo^+H+}h@)V~PRdNK}mv|+J2ff=p!"
    "K_*I+BSVA>va0$JYc>_1FWb9mYWdU4Y^Z>Cp2wDWW`(*0aJnQc;NeJwnmcJi_tD+l0DW4*(c-l@SUFEC7gr0`NAHzwW+H`EH}8QD?v8|mOFYbTxnzK<0jKEQ"
    "y!IRY!O%yMU)5M>Hi-Yj5D5LPK0Z)@NB8UqKpL<++R4(GG(36%uN)RK3n%BAfj?e?crRff(h!8OwTKFn+E?tVWj(r7;7e?vgN<U}6~Lhh#$xhop)D>%eBhTK"
    "xpKnAd<>26lqV%7$RB?xVZ*7?83eWtQ-D{|igiqKM~SFa0clnp%Zy2RRF;PRi{d8rSM?KTz*LbmE`WV*k=hG!jbImtC=CzVtwhzOvsJD!x9aYIL#@cpZuEn-"
    ")vUT!)w~K#HIdk4V}5!#{=yyYJ-v;<Q%z2gR-uKbaftK0)xUfC+*E|vy(SeiFK*>iGWkcgz2bWbgJldN_;(9B&%Q<I2W-$#fQ%d1G>bSg7G&N&urJwmLjC#a"
    "20vti$WKMYi@P8?D6*K7JH@Gna43w!YQX|ul;nCn{h^zFTxFP6oiOA7)uONzs0=^+Rk4RA{WkWqNkbg6R4vto*H-Zc-of>v10=-ag{653GfpffC7bSGIQToI"
    "BE4l$;eiJilav6{7@e9c)1q?oxmujAZa|>76*W?5b}RGsiMDP(AFv>RGJNc2*B`O-`*#EY26ZQ*pOkWwz?=2=n9OlY$MH%WRlXz#+fPD}M<!5N(?Yn0PbkuY"
    "u^GW+s&^ANc4`a8AS9}7Qn>i5Jeq^~>boC3bD9JrsVq6J;&yi~-k`n&WqdNp&uei>tBeoYXp|3LMg{htBveL9>R85}01f8R&qF`;F)j)heRGl~@~DXW_1aX6"
    "G-BM<HcnNXq<*gZ5?5f9t>LmT_=R6bQG&=%Wt8fTJ*4fjwxh_+s?C!_0kL0I?<Y(nb=#%FvEdRasTgfKLS35oc{4~nU7RqYF^+Xzg#lzaiG^K0n&>~)r_n(t"
    "*AJobWExNl9XIVe*}n0A3t{()!H*FBNY^A<=#p^(Bu=}0bvjlhQ*$QxmA%XKUM!X_i|%GyYsGnmA5H6foAsP$b`u3uzMYs(YbX*5A?tkQ>rFflYYAiDXGwuu"
    "Gr$XdH9#QKtCFYJ2{)M%m9_C9GIARFEMCly-=o<xKGBqBC6X0-pLCB{PtWm=1DL-=D&pTn=Ar<(^*fvP^~sJMlRexPm9Y|cN!!SRtH=4zi6>)KFnug>GupnB"
    ")ouPv8ESeTr{@GjP_l%bl<N4>vN+PeiCBSWPgy6P#c|X<`>E6I%&HV0xnCvFj@Y+&lq@F1hd_HDOd8$&-lU)ihEr&R)tYrlYa#Ku%#Tm1;Z2DfrJZ%6hQ>A-"
    "xftS%pg_z%SZY*z84<Sk_%xRh7f{pU0sqE*$5}{Vyv0`$1t2;D9@ldU{KU>d>bD?$zDFWzLiw4FKGRXMj=JJdnNMG7PZ3krL-m#o%Cn8=#-rWP96evB`hx}>"
    "NXk?vPVF?43xOX9FWv!t9UM1R*<l|ovB*N{PILx!llWNop3v-c;+~f9S{^@QfBKxGkGCk(d#HZGX6M6Mls13=pYiWk;CKnrY8=`}Iw03N+g#PoHuMrfiQ0ks"
    "$f!VeCOhOgXJ!22jK~E-q-2cbMOtFSE;W?rBxus;5^mK4Y82pf`y52U`suIy`1{=ii36Pp*~UV1iBV|p@c|W@AJw``x-w{12R%}9tRGJZ-Tuk?+j+Kk?MIyp"
    "?D3ac4}Y2e*YSDwK~(&)o^@}rTll1fyhI7i0YRhVPFC*e>kMbZtJcr9F>$hrd**>XUb{G4&glDdk|1Y_b^B3=-$WMLbAY<-n`SuasMpl3n@UU)3h9!xrGA=r"
    "(7KnYj)|MkMmD4+C@L>bk3%k7z6LuW4?#71+8;`JvI;wc{V9U<nl~LuubwWRhG_p14SDF>d8VP>tZ-j$_zxWMMH&"
)


@cache
def kinds() -> np.ndarray:
    """Return the index in KINDS for each code point."""
    text = zlib.decompress(base64.b85decode(RUNS)).decode()
    runs = re.findall("([A-Z])([0-9a-f]+)", text)
    return np.repeat(
        np.array([KINDS.index(kind) for kind, _ in runs], np.uint8), [int(length, 16) for _, length in runs]
    )
