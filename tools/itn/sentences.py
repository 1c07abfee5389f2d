"""Sentences around the items: what is in brackets is a choice, what is in braces is drawn."""

from __future__ import annotations

from itn.numbers import words

TRAINED = (
    "[Please|Kindly|Could you] send {count} [boxes|crates|packs] of {goods} to {town}"
    "[ by {date}|].",
    "The [invoice|bill|statement] [of|for] {company} comes to {money}[, due on {date}|].",
    "{name} [called|rang|phoned] at {time} [about|to ask about] [order|ticket|case] {code}.",
    "[You can reach|Reach|Call] {name} on {phone}[ after {time}| until {time}|].",
    "[Our|The|Their] [sales|costs|fees] [rose|fell|grew] by {percent} [to|and reached] {money}.",
    "The [parcel|crate|pallet] weighs {weight} and [costs|will cost] {money} to [send|ship].",
    "[This|It] was the {place} [meeting|visit|delivery] [since|after] {date}.",
    "{company} [was founded|opened|closed its office] in {town} on {date}.",
    "The train [to|from] {town} [leaves|arrives] at {time}, not at {time}.",
    "[We|They] [paid|refunded|were charged] {money} for {goods}, [that is|or] {percent} less.",
    "[Room|Desk|Locker|Bay] {code} is [free|booked|closed] from {time} [to|until] {time}.",
    "{name} [was born|moved here] on {date} in {town}.",
    "[About|Nearly|Over|Exactly] {count} people [live|work|voted] in {town}.",
    "The [tank|barrel|bottle] holds {volume}, [of which|and] {volume} [is|are] left.",
    "[Turnout|Demand|Interest] in {town} was {percent}, [up|down] from {percent}.",
    "[Your|The] [new|old] number is {phone}, [and|but] the code stays {code}.",
    "{name} finished {place} [out of|among] {count} [runners|swimmers|entries].",
    "[On|Since] {date} the [rate|share] [is|has been] {percent}.",
    "[The road|The path|The canal] to {town} is {length} long[ and {length} wide|].",
    "[Delivery|Pickup|Collection] is on {date} [between {time} and {time}|at {time}].",
    "[Quote|Mention|Use] reference {code} when you [write|call|pay].",
    "[A|One] [ticket|seat|pass] costs {money}, [and|but] {count} of them cost {money}.",
    "{company} [sold|bought|made] {count} [units|pieces] of {goods} [last year|this year].",
    "The {place} [floor|row|box] [holds|has] {count} [files|items|seats].",
    "[Keep|Store] the {goods} [below|above] {heat} until {date}.",
    "[Note|Remember]: the [shop|gate|office] [opens|closes] at {time} on {date}.",
    "{name} and {name} [share|split] {money}, [so|which means] {money} each.",
    "[Nobody|No one] at {company} [answered|picked up] on {phone}.",
    "On the other hand, {goods} [cost|are] {money} [less|more] in {town}.",
    "[Stock|Supply] of {goods}: {count}, [ordered|sold]: {count}, [ref|code] {code}.",
    "[Between|From] {date} and {date} [we|they] [lost|gained] {percent}.",
    "{name} [wrote|said] that one thing led to another, [and|then] asked for {money}.",
    "[Please|Then] [confirm|cancel] booking {code} for {date} at {time}.",
    "[My|Her|His] [phone|fax] is {phone} and [my|her|his] [office|desk] is {code}.",
    "[The|That] [pump|engine|heater] [runs|works] at {power} for {duration}.",
    "[Altogether|In total|In all] {count} [letters|calls] came in [before|by] {time}.",
    "{town} [lies|is] {length} from {town}, [at most|at least] {duration} by boat.",
    "[A deposit|An advance] of {money} [is|was] [held|paid] for {code}.",
    "{name}, {place} in line, [waited|stood] [from|since] {time}.",
    "[Only|Just] {percent} of {count} [answers|forms] were [complete|valid].",
    "{company} [hired|dismissed] {name} on {date} [at|for] {money} a week.",
    "[Line|Section|Page] {count} [says|reads] {date}, [which|that] is wrong.",
    "The {place} [edition|version|draft] [appeared|came out] on {date}.",
    "[Fill|Mix] {weight} of {goods} [into|with] {volume} of [water|oil].",
)
"""Sentences that models are trained on."""

UNSEEN = (
    "We shipped {count} cases of {goods} from {town} on {date} under code {code}.",
    "Ask for {name} at {phone} before {time}, please.",
    "The repair will cost {money} plus {percent} tax.",
    "{company} expects {count} visitors at its {place} fair in {town}.",
    "At {time} the sensor showed {heat}, later {heat}.",
    "A loan of {money} at {percent} was signed on {date}.",
    "Flight {code} lands in {town} at {time} with {count} guests.",
    "{name} ran {length} in {duration} and came {place}.",
    "Insurance for {goods} went from {money} to {money} on {date}.",
    "Our new branch in {town} can be called on {phone} from {date}.",
    "Bring {weight} of {goods} and {count} [cups|bags] to {company} by {time}.",
    "The {place} payment of {money} is late since {date}.",
    "Only {count} of the {goods} passed, which is {percent}.",
    "File {code} was closed by {name} at {time} on {date}.",
    "{name} lives {length} north of {town} and earns {money}.",
    "For one thing, {company} still owes us {money}.",
)
"""Sentences for held-out inputs alone."""

LOOSE = words(
    "a able again all almost also always any area at back bag became before began behind best big "
    "black board book both bridge bring brother build but by call came car case change child city "
    "clear close coat cold come copy could country cut daily dark deal deep did door down draw "
    "dry each early east easy edge end enough even every face fair far farm fast father feel few "
    "field fine fire fish flat food for found free fresh friend from front full garden gave get "
    "glass go gold good great green ground grow had hand hard has have he head hear heat heavy "
    "help her here high hill him his hold home hope horse hot house how ice idea if in inner into "
    "iron is it its join just keep kind king knew lady lake land large later lead learn leave "
    "left less let letter light like list little local long look loss low made main make man many "
    "map may mean metal might milk mind more most move much music must name near need new next "
    "night no north not notice now of off offer often old on only open or order other our out "
    "over own paid paper part pass path pay people place plain plan plant play poor power press "
    "price print put quick quiet rain rather read ready real red report rest rich ride right ring "
    "river road rock roof room round rule run safe said sail same sand sea see seem sell send set "
    "several shall she ship shop short should show side silver simple since sister size small "
    "snow so soft some soon south space stand start state stay still stone stop store street "
    "strong such summer sun table take talk tall tax tell than that the their them then there "
    "they thick thin think this those though through time told too took top town trade tree trip "
    "true try turn under until up us use very visit voice wait walk wall want warm was water way "
    "weak wear week well went were west what when where which while white who whole why wide will "
    "wind winter with without woman wood word work world would year yellow yet you young your"
)
"""Words of sentences that make no sense, which teach that what is not an item is copied.

None of them could be part of an item.
"""

PHRASES = words(
    "on one side;at one end;in one go;as one man;this one;some one;from one place;no one;"
    "by one hand;over one year",
    ";",
)
"""What looks like an item and is none; the beginning keeps it apart from an item before it."""
ONSETS = words("b c d f g h j k l m n p r s t v w y z th sh ch st br cr pl gr wh qu")
VOWELS = words("a e i o u ea oo ai ie ou")
CODAS = words("n r s t l d m ck ve se ns ps st th rn ng ke te ble ly ry")
"""Parts of spelled words."""

WORDS = {
    "name": words(
        "Anna Ben Carla David Elena Frank Grace Henry Irene Jacob Karen Louis Maria Nathan Olivia "
        "Peter Rosa Samuel Teresa Victor Wendy Yusuf Zoe Marta Hugo Ingrid Pavel Amina Tomas Lucia"
    ),
    "town": words(
        "Bristol Leeds York Dover Oxford Dublin Cardiff Belfast Exeter Norwich Lisbon Madrid Turin "
        "Vienna Prague Gdansk Bergen Malmo Riga Tallinn Porto Seville Lyon Nantes Ghent Basel Graz"
    ),
    "goods": words(
        "apples;paper;copper wire;printer ink;green tea;oak boards;bricks;window glass;rice;paint;"
        "batteries;olive oil;winter coats;bicycle tyres;candles;roof tiles;coffee;steel pipes;"
        "garden chairs;light bulbs;flour;wool;medicine;spare parts;notebooks;salt;frozen fish;maps",
        ";",
    ),
}
"""Words by the name they are drawn under; half of the names and towns are made of SYLLABLES."""

SYLLABLES = words(
    "bar bel cor dan del fen gar hol jun kas lan lor mar mil nor ost pel quin ras sel tam tor ul "
    "van vel wes yar zan bri cla dre fro gli kra plo ska sto tri vo ne ra li mo ta shi pe du ka"
)
ENDINGS = words("Ltd;and Sons;Group;Works;Brothers;Limited;Trading;Foods", ";")
