"""The online shop: categories, search, reviews, a cart, a wish list, orders and an account.

The customer is Emma Lopez, signed in. The admin site works on the same tables of products, reviews,
customers and orders.
"""

import random

from websites.site import (
    Site, button, choose, esc, field, form, link, links, money, pager, table, top_bar, words,
)

WORDS = words("shop")
CATEGORIES = WORDS.categories
STATES = ["Pending", "Processing", "Complete", "Canceled"]
STATE_COLORS = {"Pending": "warn", "Processing": "", "Complete": "good", "Canceled": "bad"}
MONTHS = (
    "January February March April May June July August September October November December"
).split()
EMMA = 1  # the customer who is signed in
PAGE_SIZE = 8  # products on a page
ORDERS_PAGE_SIZE = 10
FIRST_ID = 101  # ids of three digits: no address of a product is the beginning of another's
NUM_ORDERS = 72
SCHEMA = """
create table product(id integer primary key, sku text, name text, category text, price int,
  stock int, color text, material text, weight int, warranty int, enabled int default 1);
create table customer(id integer primary key, name text, email text, city text, street text,
  postcode text, phone text);
create table review(id integer primary key, product int, author text, stars int, title text,
  body text, state text);
create table orders(id integer primary key, number text, customer int, date text, state text,
  shipping text, address text, tracking text default '', note text default '');
create table line(orders int, product int, name text, price int, amount int);
create table cart(product int primary key, amount int);
create table wish(product int primary key)
"""


# ---- the content of the tables; the order of the random draws must not change ----


def fill(db, rng):
    products = _fill_products(db, rng)
    all_names = [f"{first} {last}" for first in WORDS.first_names for last in WORDS.last_names]
    people = rng.sample(all_names, 60)
    customers, reviewers = people[:23], people[23:]
    _fill_customers(db, rng, ["Emma Lopez", *customers])
    _fill_reviews(db, rng, products, reviewers)
    _fill_orders(db, rng, len(products))


def _fill_products(db, rng):
    """Insert 12 products of each category -> their names."""
    combinations = [
        (brand, style, category, thing)
        for category, things in CATEGORIES.items()
        for thing in things
        for brand in WORDS.brands
        for style in WORDS.styles
    ]
    chosen = []
    count = dict.fromkeys(CATEGORIES, 0)
    for brand, style, category, thing in rng.sample(combinations, 400):
        if count[category] < 12:
            count[category] += 1
            chosen.append((f"{brand} {style} {thing}", category))
    # No price occurs twice: sorting by price has one result.
    prices = rng.sample(range(799, 24999, 100), len(chosen))
    for product, ((name, category), price) in enumerate(zip(chosen, prices), FIRST_ID):
        stock = rng.choice([0, 3, 8, 15, 40, 75])
        color = rng.choice(WORDS.colors)
        material = rng.choice(WORDS.materials)
        weight = rng.randrange(100, 6000, 50)
        warranty = rng.choice([1, 2, 3, 5])
        db.execute(
            "insert into product values(?,?,?,?,?,?,?,?,?,?,1)",
            (product, f"SKU-{product}", name, category, price, stock, color, material, weight,
             warranty))
    return [name for name, _ in chosen]


def _fill_customers(db, rng, names):
    for customer, name in enumerate(names, EMMA):
        email = f"{name.lower().replace(' ', '.')}@example.com"
        city = rng.choice(WORDS.cities)
        street = f"{rng.randint(1, 99)} {rng.choice(WORDS.last_names)} Street"
        postcode = str(rng.randint(10000, 99999))
        phone = f"555-{rng.randint(1000, 9999)}"
        db.execute(
            "insert into customer values(?,?,?,?,?,?,?)",
            (customer, name, email, city, street, postcode, phone))


def _fill_reviews(db, rng, products, reviewers):
    for product, name in enumerate(products, FIRST_ID):
        for author in rng.sample(reviewers, rng.randint(0, 4)):
            stars = rng.choice([1, 2, 3, 4, 4, 5, 5])
            good = stars > 3
            text = rng.choice(WORDS.praise if good else WORDS.blame)
            title = "Very happy" if good else "Disappointed"
            body = f"The {name.split()[-1].lower()} {text}."
            state = "Pending" if rng.random() < 0.07 else "Approved"
            db.execute(
                "insert into review(product,author,stars,title,body,state) values(?,?,?,?,?,?)",
                (product, author, stars, title, body, state))


def _fill_orders(db, rng, num_products):
    number = rng.randint(2000, 6000)
    all_days = [(y, m, d) for y in (2024, 2025) for m in range(1, 13) for d in range(1, 29)]
    days = sorted(rng.sample(all_days, NUM_ORDERS))
    last = NUM_ORDERS - 1
    emmas = set(rng.sample(range(NUM_ORDERS), 16)) | {last}  # the newest order is Emma's
    for index, (year, month, day) in enumerate(days):
        number += rng.randint(1, 9)
        customer = EMMA if index in emmas else rng.randint(2, 24)
        is_recent = index >= NUM_ORDERS - 6
        state = rng.choice(STATES[:2] if is_recent else STATES)
        shipping = rng.choice(["Standard", "Express"])
        num_lines = rng.choice([1, 1, 2, 3])
        ids = range(FIRST_ID, FIRST_ID + num_products)
        lines = [(product, rng.randint(1, 3)) for product in rng.sample(ids, num_lines)]
        date = f"{year}-{month:02}-{day:02}"
        place_order(db, number, customer, date, state, shipping, lines)


def place_order(db, number, customer, date, state, shipping, lines):
    """Insert an order; lines: (product id, amount) pairs, at today's names and prices."""
    address = db.execute(
        "select name, street, city, postcode from customer where id=?", (customer,)
    ).fetchone()
    order_id = db.execute(
        "insert into orders(number,customer,date,state,shipping,address) values(?,?,?,?,?,?)",
        (f"{number:09}", customer, date, state, shipping, ", ".join(address)),
    ).lastrowid
    for product_id, amount in lines:
        name, price = db.execute(
            "select name, price from product where id=?", (product_id,)
        ).fetchone()
        db.execute(
            "insert into line values(?,?,?,?,?)", (order_id, product_id, name, price, amount))


# SQL expressions: an order's total in cents, and a product's mean number of stars.
TOTAL = "(select sum(price*amount) from line where orders=orders.id)"
RATING = "(select avg(stars) from review where product=product.id and state='Approved')"


# ---- pieces of pages ----


def picture(name):
    """A drawing in place of a photograph: the same for the same name."""
    rng = random.Random(name)
    hue = rng.randrange(360)
    shape = rng.randrange(3)
    body = [
        '<rect x="62" y="38" width="76" height="66" rx="14"/>',
        '<circle cx="100" cy="70" r="36"/>',
        '<path d="M66 104 L78 40 H122 L134 104 Z" stroke-linejoin="round"/>',
    ][shape]
    return (
        '<svg viewBox="0 0 200 140" aria-hidden="true">'
        f'<rect width="200" height="140" fill="hsl({hue},38%,90%)"/>'
        f'<g fill="hsl({hue},45%,46%)" stroke="hsl({hue},45%,32%)" stroke-width="3">{body}</g>'
        f'<circle cx="{84 + 8 * shape}" cy="58" r="9" fill="#ffffff66"/>'
        f'<ellipse cx="100" cy="116" rx="52" ry="6" fill="hsl({hue},25%,78%)"/></svg>'
    )


def stars(value):
    """A rating from 0 to 5 as stars, with the number as the accessible name."""
    full = round(value)
    return (
        f'<span class="stars" role="img" aria-label="{value:.1f} of 5 stars">'
        f'<span aria-hidden="true">{"★" * full}{"☆" * (5 - full)}</span></span>'
    )


def frame(request, title, body):
    count = request.rows("select coalesce(sum(amount),0) from cart")[0][0]
    categories = "".join(link(f"/category/{name.lower()}", name) for name in CATEGORIES)
    menu = [link("/orders", "My orders"), link("/wishlist", "Wish list"),
            link("/account", "Account"), link("/cart", f"Cart ({count})")]
    header = top_bar(request, "Harbour Market", "Search the shop", *menu)
    return (
        f'{header}<nav class="sub" aria-label="Categories"><div>{categories}</div></nav>'
        f'<main>{body}</main>'
    )


SITE = Site("shop", "Harbour Market", SCHEMA, fill, frame)


def cards(request, where, values, order="product.id", limit=PAGE_SIZE):
    """A grid of the products that meet the SQL condition `where`: the request's page of them."""
    products = request.page_of(
        f"select id,name,price,{RATING} from product where enabled=1 and {where} order by {order}",
        limit, *values)
    html = ""
    for product_id, name, price, rating in products:
        rated = stars(rating) if rating else "<span class=muted>no reviews</span>"
        html += (
            f'<div class="card">{picture(name)}<p>{link(f"/product/{product_id}", name)}</p>'
            f'<span class="price">{money(price)}</span> {rated}</div>'
        )
    return f'<div class="grid">{html}</div>'


def state_tag(state):
    """An order's state as a coloured tag."""
    return f'<span class="tag {STATE_COLORS[state]}">{state}</span>'


# ---- products ----


@SITE.get("/")
def front(request):
    best_first = "(select coalesce(sum(amount),0) from line where product=product.id) desc, id"
    return "Harbour Market", (
        '<div class="hero"><h1>Good things for home and away</h1>'
        "<p>Free standard delivery on every order.</p></div>"
        f"<h2>Best sellers</h2>{cards(request, '1', [], best_first, 4)}"
    )


SORTS = {"price": "price", "price_desc": "price desc", "name": "name"}


@SITE.get("/category/([a-z]+)")
def category(request, slug):
    name = slug.capitalize()
    order = SORTS.get(request.query.get("sort", ""), "product.id")
    count = request.value("select count(*) from product where category=? and enabled=1", name)
    request.value("select 1 from product where category=?", name)
    sorts = links(request.path, "sort", {
        "Cheapest first": "price", "Dearest first": "price_desc", "By name": "name"})
    return name, (
        f'<h1>{esc(name)}</h1>'
        f'<p class="pager"><span>{count} products. Sort:</span> {sorts}</p>'
        f'{cards(request, "category=?", [name], order)}{pager(request, count, PAGE_SIZE)}'
    )


def like_pattern(word):
    """A pattern for SQL's `like ... escape '\\'` that finds the word anywhere.

    >>> print(like_pattern("50%"))
    %50\\%%
    """
    escaped = "".join("\\" + c if c in "%_\\" else c for c in word)
    return f"%{escaped}%"


@SITE.get("/search")
def search(request):
    words = request.query.get("q", "").split()[:8]
    condition = "(name||' '||category||' '||sku) like ? escape '\\'"
    where = " and ".join([condition] * len(words)) or "0"
    values = [like_pattern(word) for word in words]
    count = request.value(f"select count(*) from product where enabled=1 and {where}", *values)
    return "Search", (
        f"<h1>{count} results for '{esc(' '.join(words))}'</h1>"
        f"{cards(request, where, values)}{pager(request, count, PAGE_SIZE)}"
    )


@SITE.get(r"/product/(\d{1,9})")
def product(request, number):
    product_id, sku, name, kind, price, stock, color, material, weight, warranty = request.row(
        "select id,sku,name,category,price,stock,color,material,weight,warranty from product "
        "where id=? and enabled=1",
        int(number))
    details = [
        ["SKU", sku],
        ["Color", color],
        ["Material", material],
        ["Weight", f"{weight} g"],
        ["Warranty", f"{warranty} year{'s' if warranty > 1 else ''}"],
        ["In stock", str(stock) if stock else "sold out"],
    ]

    reviews = request.rows(
        "select author,stars,title,body from review where product=? and state='Approved' "
        "order by id desc",
        product_id)
    review_boxes = "".join(
        f'<div class="box"><b>{esc(title)}</b> {stars(rating)} '
        f'<span class="muted">by {esc(author)}</span><p>{esc(body)}</p></div>'
        for author, rating, title, body in reviews)

    buy = ""
    if stock:
        hidden = f'<input type="hidden" name="product" value="{product_id}">'
        buy = form("/cart/add", "Add to cart", hidden, field("amount", "Quantity", 1))
    wish_button = button("/wishlist/add", "Add to wish list", kind="plain", product=product_id)
    return name, (
        f'<div class="cols"><div><p class="muted">{link("/category/" + kind.lower(), kind)}</p>'
        f'<h1>{esc(name)}</h1><p class="price">{money(price)}</p>'
        f'{table(["Detail", "Value"], details)}<h2>{len(reviews)} reviews</h2>'
        f'<p>{link(f"/product/{product_id}/review", "Write a review")}</p>{review_boxes}</div>'
        f'<div><div class="card">{picture(name)}{buy}<p>{wish_button}</p></div></div></div>'
    )


@SITE.get(r"/product/(\d{1,9})/review")
def review_form(request, number):
    name = request.value("select name from product where id=?", int(number))
    options = [(n, f"{n} star{'s' if n > 1 else ''}") for n in (5, 4, 3, 2, 1)]
    return f"Review {name}", (
        f'<h1>Your review of {esc(name)}</h1>' + form(
            f"/product/{number}/review", "Send review", choose("stars", "Stars", options),
            field("title", "Title"), field("body", "Text", kind="area"))
    )


@SITE.post(r"/product/(\d{1,9})/review")
def review(request, number):
    request.value("select id from product where id=?", int(number))
    title = request.text("title")
    if title:
        rating = max(1, request.number("stars", 5, 5))
        request.change(
            "insert into review(product,author,stars,title,body,state) "
            "values(?,'Emma Lopez',?,?,?,'Approved')",
            int(number), rating, title, request.text("body"))
    return f"/product/{int(number)}"


# ---- the cart and the order that is made of it ----

ADD_TO_CART = (
    "insert into cart values(?,?) "
    "on conflict(product) do update set amount=min(99,amount+excluded.amount)"
)


@SITE.get("/cart")
def cart(request):
    lines = request.rows(
        "select product.id,name,price,amount from cart join product on product.id=product "
        "order by cart.rowid")
    if not lines:
        return "Cart", "<h1>Cart</h1><p>Your cart is empty.</p>"
    rows = []
    total = 0
    for product_id, name, price, amount in lines:
        remove = button("/cart/remove", "Remove", f"Remove {name}", "danger", product=product_id)
        name_link = link(f"/product/{product_id}", name)
        rows.append([name_link, money(price), str(amount), money(price * amount), remove])
        total += price * amount
    heads = ["Product", "Price", "Quantity", "Sum", ""]
    return "Cart", (
        f'<h1>Cart</h1>{table(heads, rows, "lines")}<p class="price">Total {money(total)}</p>'
        f'<p>{link("/checkout", "Proceed to checkout")}</p>'
    )


@SITE.post("/cart/add")
def cart_add(request):
    product_id = request.value(
        "select id from product where id=? and enabled=1 and stock>0", request.number("product"))
    request.change(ADD_TO_CART, product_id, max(1, request.number("amount", 1, 99)))
    return "/cart"


@SITE.post("/cart/remove")
def cart_remove(request):
    request.change("delete from cart where product=?", request.number("product"))
    return "/cart"


@SITE.get("/checkout")
def checkout(request):
    request.value("select 1 from cart")
    address = request.row("select name,street,city,postcode from customer where id=?", EMMA)
    total = request.value("select sum(price*amount) from cart join product on product.id=product")
    return "Checkout", (
        f'<h1>Checkout</h1><div class="box"><h2>Delivery address</h2><p>{esc(", ".join(address))}'
        '</p></div>' + form(
            "/checkout", "Place order",
            choose("shipping", "Shipping method", ["Standard", "Express"]),
            f'<p class="price">Total {money(total)}</p>')
    )


@SITE.post("/checkout")
def order(request):
    lines = request.rows("select product,amount from cart order by rowid")
    if not lines:
        return "/cart"
    number = int(request.value("select max(number) from orders")) + 1
    shipping = "Express" if request.text("shipping") == "Express" else "Standard"
    place_order(request.db, number, EMMA, "2026-01-05", "Pending", shipping, lines)
    request.change("delete from cart")
    return f"/orders/{number:09}"


# ---- orders ----


@SITE.get("/orders")
def orders(request):
    count = request.value("select count(*) from orders where customer=?", EMMA)
    found = request.page_of(
        f"select number,date,state,{TOTAL} from orders where customer=? order by number desc",
        ORDERS_PAGE_SIZE, EMMA)
    rows = [
        [link(f"/orders/{number}", f"#{number}"), date, money(total), state_tag(state)]
        for number, date, state, total in found
    ]
    return "My orders", (
        f'<h1>My orders</h1>{table(["Order", "Date", "Total", "Status"], rows)}'
        f'{pager(request, count, ORDERS_PAGE_SIZE)}'
    )


def lines_table(request, order_id, product_cell):
    """What was ordered. product_cell: the product's id and name -> a cell."""
    lines = request.rows(
        "select product,name,price,amount from line where orders=? order by rowid", order_id)
    return table(["Product", "Price", "Quantity", "Sum"], [
        [product_cell(product, name), money(price), str(amount), money(price * amount)]
        for product, name, price, amount in lines])


@SITE.get(r"/orders/(\d{9})")
def order_page(request, number):
    order_id, date, state, shipping, address, tracking, total = request.row(
        f"select id,date,state,shipping,address,tracking,{TOTAL} from orders "
        "where number=? and customer=?", number, EMMA)
    lines = lines_table(request, order_id, lambda product, name: link(f"/product/{product}", name))
    cancel_button = ""
    if state == "Pending":
        cancel_button = button(f"/orders/{number}/cancel", "Cancel order", kind="danger")
    again_button = button(f"/orders/{number}/again", "Order again", kind="plain")
    return f"Order #{number}", (
        f'<h1>Order #{number}</h1><p>{state_tag(state)} '
        f'<span class="muted">placed on {date}</span></p>'
        f'{lines}<p class="price">Total {money(total)}</p>'
        f'<div class="box"><p>Shipping: {shipping}</p><p>Delivered to {esc(address)}</p>'
        f'<p>Tracking number: {esc(tracking) or "none yet"}</p></div>{cancel_button}{again_button}'
    )


@SITE.post(r"/orders/(\d{9})/cancel")
def cancel(request, number):
    request.change(
        "update orders set state='Canceled' where number=? and customer=? and state='Pending'",
        number, EMMA)
    return f"/orders/{number}"


@SITE.post(r"/orders/(\d{9})/again")
def again(request, number):
    order_id = request.value("select id from orders where number=? and customer=?", number, EMMA)
    for line in request.rows("select product,amount from line where orders=?", order_id):
        request.change(ADD_TO_CART, *line)
    return "/cart"


# ---- the wish list ----


@SITE.get("/wishlist")
def wishlist(request):
    rows = []
    for product_id, name, price in request.rows(
        "select id,name,price from wish join product on id=product order by wish.rowid"
    ):
        label = f"Remove {name}"
        remove = button("/wishlist/remove", "Remove", label, "danger", product=product_id)
        rows.append([link(f"/product/{product_id}", name), money(price), remove])
    if not rows:
        return "Wish list", "<h1>Wish list</h1><p>Your wish list is empty.</p>"
    return "Wish list", f'<h1>Wish list</h1>{table(["Product", "Price", ""], rows, "lines")}'


@SITE.post("/wishlist/(add|remove)")
def wish(request, what):
    product_id = request.value("select id from product where id=?", request.number("product"))
    if what == "add":
        request.change("insert or ignore into wish values(?)", product_id)
    else:
        request.change("delete from wish where product=?", product_id)
    return "/wishlist"


# ---- the account ----


@SITE.get("/account")
def account(request):
    name, email, street, city, postcode, phone = request.row(
        "select name,email,street,city,postcode,phone from customer where id=?", EMMA)
    return "Account", (
        f'<h1>Account</h1><div class="box"><h2>{esc(name)}</h2><p>{esc(email)}</p>'
        f'<p>Telephone {esc(phone)}</p></div><div class="box address"><h2>Address</h2>'
        f'<p>{esc(street)}</p><p>{esc(city)}</p><p>{esc(postcode)}</p>'
        f'<p>{link("/account/edit", "Change address")}</p></div>'
    )


@SITE.get("/account/edit")
def account_form(request):
    street, city, postcode, phone = request.row(
        "select street,city,postcode,phone from customer where id=?", EMMA)
    return "Change address", "<h1>Change address</h1>" + form(
        "/account/edit", "Save address", field("street", "Street", street),
        field("city", "City", city), field("postcode", "Postcode", postcode),
        field("phone", "Telephone", phone))


@SITE.post("/account/edit")
def account_save(request):
    values = [request.text(name, 100) for name in ("street", "city", "postcode", "phone")]
    request.change(
        "update customer set street=?,city=?,postcode=?,phone=? where id=?", *values, EMMA)
    return "/account"
